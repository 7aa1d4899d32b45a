package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"time"

	appv1 "github.com/argoproj/argo-cd/v3/pkg/apis/application/v1alpha1"
	"github.com/argoproj/argo-cd/v3/util/lua"
	"github.com/argoproj/gitops-engine/pkg/cache"
	"github.com/argoproj/gitops-engine/pkg/engine"
	"github.com/argoproj/gitops-engine/pkg/sync"
	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/tools/clientcmd"
)

// Objects that have this label with the name of the application are its own: what Git has no more is pruned.
const label = "app.kubernetes.io/instance"

type syncQuestion struct {
	Kubeconfig  string            `json:"kubeconfig"`
	Namespace   string            `json:"namespace"`
	Application string            `json:"application"`
	Health      string            `json:"health"`
	Seconds     int               `json:"seconds"`
	Objects     []json.RawMessage `json:"objects"`
}

type syncResult struct {
	Name    string `json:"name"`
	Status  string `json:"status"`
	Phase   string `json:"phase"`
	Message string `json:"message"`
}

// syncOnce makes a namespace what Git has, wave by wave, as Argo CD's application controller does: by the same
// engine, with the health that the script says.
func syncOnce() error {
	var asked syncQuestion
	if err := json.NewDecoder(os.Stdin).Decode(&asked); err != nil {
		return err
	}
	config, err := clientcmd.BuildConfigFromFlags("", asked.Kubeconfig)
	if err != nil {
		return err
	}
	objects := make([]*unstructured.Unstructured, 0, len(asked.Objects))
	overrides := lua.ResourceHealthOverrides{}
	for number, raw := range asked.Objects {
		object := &unstructured.Unstructured{}
		if err := object.UnmarshalJSON(raw); err != nil {
			return fmt.Errorf("object %d: %w", number, err)
		}
		objects = append(objects, object)
		key := lua.GetConfigMapKey(object.GroupVersionKind())
		overrides[key] = appv1.ResourceOverride{HealthLua: asked.Health}
	}

	live := cache.NewClusterCache(config,
		cache.SetNamespaces([]string{asked.Namespace}),
		cache.SetLogr(logr.Discard()),
		cache.SetPopulateResourceInfoHandler(
			func(object *unstructured.Unstructured, _ bool) (any, bool) {
				isOurs := object.GetLabels()[label] == asked.Application
				return isOurs, isOurs
			}),
	)
	gitops := engine.NewEngine(config, live, engine.WithLogr(logr.Discard()))
	stop, err := gitops.Run()
	if err != nil {
		return err
	}
	defer stop()
	limit, cancel := context.WithTimeout(
		context.Background(), time.Duration(asked.Seconds)*time.Second)
	defer cancel()
	found, err := gitops.Sync(limit, objects,
		func(resource *cache.Resource) bool {
			isOurs, _ := resource.Info.(bool)
			return isOurs
		},
		"revision", asked.Namespace,
		sync.WithLogr(logr.Discard()),
		sync.WithHealthOverride(overrides),
		sync.WithPrune(true),
		sync.WithServerSideApply(true),
		sync.WithServerSideApplyManager("argocd-controller"),
	)
	if err != nil {
		return err
	}

	results := make([]syncResult, 0, len(found))
	for _, one := range found {
		results = append(results, syncResult{
			one.ResourceKey.Name, string(one.Status), string(one.HookPhase), one.Message})
	}
	return json.NewEncoder(os.Stdout).Encode(results)
}
